"""What executes, generates and illustrates the documents."""
