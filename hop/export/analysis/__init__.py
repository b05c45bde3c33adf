"""Programs compared, and their sums bounded."""
