"""What Alembic runs for every upgrade: the steps, on the connection and in the transaction it is handed."""

from alembic import context

from boxcal.app.registry.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
