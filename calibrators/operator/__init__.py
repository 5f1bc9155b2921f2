"""The box-constrained softmax, its gradient and the bounds it takes."""
