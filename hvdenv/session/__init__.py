"""What the user asked for: opened, trusted and planned, and where it runs."""
