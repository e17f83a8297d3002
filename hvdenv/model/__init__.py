"""What recipes, clusters and machines are, as typed data; reading them."""
