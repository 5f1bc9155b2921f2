"""Run by Alembic for every upgrade, on the connection and in the transaction that it is given."""

from alembic import context

from boxcal.app.registry.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
