"""The store: a folder of records built once from a checkpoint, and everything that reads or checks it."""
