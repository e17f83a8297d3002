"""What is known about Horovod, as data: rules, patches, failures; and judging by it."""
