"""How the tables came to be, one step a file; a start applies what its database is missing.

`HEAD` names the newest step, so that a start whose database is up to date need not load Alembic at all.
"""

HEAD = "0002"
