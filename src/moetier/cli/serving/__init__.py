"""What `moetier serve` does, in parts."""
