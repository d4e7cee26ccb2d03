"""What tools/fuzz.py draws, runs, compares and writes down."""
