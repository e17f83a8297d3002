"""Images of an environment: their definitions, and the tools that build them."""
