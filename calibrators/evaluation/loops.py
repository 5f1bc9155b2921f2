"""Compiled loops of the metrics: sums over cells of the probabilities, over bins and over a grid."""

from typing import Any

import numpy as np

from boxcal.calibrators.evaluation.bins import NUM_BINS
from boxcal.calibrators.operator.compiling import compiled

Array = np.ndarray[Any, Any]


@compiled
def fill_cells(rows: Array, edges: Array, cells: Array) -> None:
    """Fill the cell k * 15 + m of each probability (n, K): class k, bin m of equal width.

    `edges` are the inner 14 edges of the bins; a probability on an edge is in the bin below it.
    """
    last = edges.shape[0]
    for n in range(rows.shape[0]):
        for k in range(rows.shape[1]):
            p = rows[n, k]
            m = min(max(int(p * (last + 1)), 0), last)
            while m > 0 and edges[m - 1] >= p:
                m -= 1
            while m < last and edges[m] < p:
                m += 1
            cells[n, k] = k * NUM_BINS + m


@compiled
def tally(rows: Array, cells: Array, labels: Array, weights: Array, sums: Array) -> None:
    """Add to sums (6, cells) what `ClassCells` keeps of each cell.

    Number of probabilities p, sum of p, number of hits, sum of p^2, sum of 1 - 2 p over the hits, and sum of
    p (1 - p). Each row counts `weights` (n,) times in the first three, and with the square in the others.
    """
    for n in range(rows.shape[0]):
        weight, square = weights[n], weights[n] * weights[n]
        for k in range(rows.shape[1]):
            p, cell = rows[n, k], cells[n, k]
            sums[0, cell] += weight
            sums[1, cell] += weight * p
            sums[3, cell] += square * (p * p)
            sums[5, cell] += square * (p * (1 - p))
        hit = cells[n, labels[n]]
        sums[2, hit] += weight
        sums[4, hit] += square * (1 - 2 * rows[n, labels[n]])


@compiled
def tally_groups(residuals: Array, cells: Array, groups: Array, open_sums: Array, squares: Array) -> None:
    """Add to squares (cells,) the squared sum over each group in each cell of residuals (n, K), less squares.

    `groups` (n,): rows of a group follow each other. `open_sums` (cells + 1,): the sums of the group that the
    last rows were of, which more rows may belong to, and the group; its sums are added once another begins.
    """
    last = squares.shape[0]
    for n in range(residuals.shape[0]):
        if groups[n] != open_sums[last]:
            for cell in range(last):
                squares[cell] += open_sums[cell] * open_sums[cell]
                open_sums[cell] = 0.0
            open_sums[last] = groups[n]
        for k in range(residuals.shape[1]):
            open_sums[cells[n, k]] += residuals[n, k]
            squares[cells[n, k]] -= residuals[n, k] * residuals[n, k]


@compiled
def draw_labels(rows: Array, uniform: Array, labels: Array) -> None:
    """Draw labels (n, draws) from the distributions in rows (n, K), by inversion of uniform numbers.

    Both sides of each comparison are moved by the row's number, which rounds them as in one sorted array of
    all rows.
    """
    size = rows.shape[1]
    cumulative = np.empty(size)
    for n in range(rows.shape[0]):
        total = 0.0
        for k in range(size):
            total += rows[n, k]
            cumulative[k] = total
        for k in range(size):
            cumulative[k] = cumulative[k] / total + n
        for draw in range(uniform.shape[1]):
            wanted = uniform[n, draw] + n
            low, high = 0, size
            while low < high:
                middle = (low + high) // 2
                if cumulative[middle] <= wanted:
                    low = middle + 1
                else:
                    high = middle
            labels[n, draw] = min(low, size - 1)


@compiled
def count_hits(cells: Array, weights: Array, hits: Array) -> None:
    """Add to hits (15 K, draws) the cells (n, draws) of labels that were drawn, each row with its weight."""
    for n in range(cells.shape[0]):
        for draw in range(cells.shape[1]):
            hits[cells[n, draw], draw] += weights[n]


@compiled
def add_by_group(groups: Array, values: Array, sums: Array) -> None:
    """Add values (N, R) to the sums (G, R) of their groups."""
    for n in range(values.shape[0]):
        group = groups[n]
        for r in range(values.shape[1]):
            sums[group, r] += values[n, r]


@compiled
def largest_running_sums(order: Array, is_last: Array, values: Array, largest: Array) -> None:
    """Fill the largest absolute sum (R,) of values (N, R) from the first in order to the end of a level."""
    running = np.zeros(values.shape[1])
    largest[:] = 0.0
    for i in range(order.shape[0]):
        n = order[i]
        for r in range(values.shape[1]):
            running[r] += values[n, r]
        if is_last[i]:
            for r in range(values.shape[1]):
                largest[r] = max(largest[r], abs(running[r]))


@compiled
def add_to_grid(left: Array, share: Array, values: Array, columns: Array, grid: Array) -> None:
    """Distribute some columns of values (N, R) to the grid points `left` and `left + 1`.

    The latter has `share`. `columns`: their numbers, one for each column of the grid; a copy of these columns
    would take several times as long.
    """
    for n in range(values.shape[0]):
        here, after, before = left[n], share[n], 1 - share[n]
        for r in range(columns.shape[0]):
            value = values[n, columns[r]]
            grid[here, r] += value * before
            grid[here + 1, r] += value * after


@compiled
def add_drawn_to_grid(  # noqa: PLR0917 - compiled loops take arrays by position
    left: Array, share: Array, confidence: Array, weights: Array, uniform: Array, grid: Array
) -> None:
    """Distribute to a grid the residuals of outcomes (n, R): 1 where `uniform` is below the confidence."""
    for n in range(uniform.shape[0]):
        here, after, before, p = left[n], share[n], 1 - share[n], confidence[n]
        for r in range(uniform.shape[1]):
            residual = weights[n] * (p - 1.0 if uniform[n, r] < p else p)
            grid[here, r] += residual * before
            grid[here + 1, r] += residual * after
