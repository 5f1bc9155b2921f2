"""The migrations from 0.3.0 on, one file per step.

A step only adds, so that the release before works on its tables.
`HEAD` names the newest step. A start whose database is up to date does not load Alembic, nor does one whose
database is new: it gets its tables from `boxcal.app.registry.tables`.
"""

HEAD = "0012"
SCRIPTS = "boxcal.app.registry:migrations"
"""Where Alembic finds the steps."""
