"""The proof of a training program: how its ranks are started, and what they show."""
