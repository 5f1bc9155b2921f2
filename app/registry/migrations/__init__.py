"""The migrations, one file per step. A start applies the steps that its database does not have yet.

`HEAD` names the newest step: a start whose database is up to date does not load Alembic.
"""

HEAD = "0011"
