"""The one reader of tables and arrays: formats, then batches of rows, then columns, labels and scores."""
