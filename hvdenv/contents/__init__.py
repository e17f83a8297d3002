"""What an environment is made of: compared, and in other programs' formats."""
