"""The most probable classes of a row, in order: what an answer shows of it.

Upper bounds create ties; the larger calibrated logit comes first among them, and then the lower index.
"""

from boxcal.calibrators.operator.compiling import compiled
from boxcal.calibrators.operator.exact_row import Array


@compiled
def most_probable(probabilities: Array, logits: Array, ranking: Array) -> None:
    """Fill `ranking` (int64) with the indices of the largest probabilities of a row, the largest first.

    One pass with an insertion into the ranking so far: quick where it is short.
    """
    filled, least = 0, -1.0
    for i in range(len(probabilities)):
        if probabilities[i] < least:
            continue
        place = filled
        while place > 0:
            before = ranking[place - 1]
            if probabilities[i] < probabilities[before]:
                break
            if probabilities[i] == probabilities[before] and logits[i] <= logits[before]:
                break
            place -= 1
        if place >= len(ranking):
            continue
        if filled < len(ranking):
            filled += 1
        for k in range(filled - 1, place, -1):
            ranking[k] = ranking[k - 1]
        ranking[place] = i
        if filled == len(ranking):
            least = probabilities[ranking[filled - 1]]
