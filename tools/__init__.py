"""Programs for those who change the project: attacks on a running service, and what writes the documents."""
