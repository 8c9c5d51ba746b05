"""What can be trained for a target: draft heads and judges, on text that the target itself wrote."""
