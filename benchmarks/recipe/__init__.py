"""The paper's recipe for instance-dependent methods, and boxcal's fits beside it."""
