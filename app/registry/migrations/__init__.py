"""The migrations, one file per step. A start applies the steps that its database does not have yet.

`HEAD` names the newest step: a start whose database is up to date does not load Alembic. A new SQLite file
gets the tables of all steps at once, from `NEW_FILE`.
"""

from pathlib import Path

HEAD = "0011"
NEW_FILE = Path(__file__).with_name("sqlite.sql")
