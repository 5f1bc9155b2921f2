"""What a request carries to a backbone: images, tensors, rows of features, texts."""
