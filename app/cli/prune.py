"""`boxcal prune`: deletes the large parts of old calibrators from the registry of the settings."""

from boxcal.app.cli.output import screen, write_json
from boxcal.app.cli.settings import read_settings
from boxcal.app.registry.maintenance import prune_and_compact


def run(keep_versions: int, keep_days: float, *, as_json: bool) -> None:
    """Prune, and print the versions.

    Raises
    ------
    BoxcalError
        The registry does not answer, or cannot be used.
    """
    url = read_settings().registry_url
    pruned = prune_and_compact(url, keep_versions=keep_versions, keep_days=keep_days)
    if as_json:
        write_json({"pruned": pruned})
    else:
        screen.print(f"Pruned {len(pruned)} calibrators: {', '.join(map(str, pruned)) or 'none'}.")
