"""A Flower app: handwritten digits on many clients, trained on with user-level privacy."""
