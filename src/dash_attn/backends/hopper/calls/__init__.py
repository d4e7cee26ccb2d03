"""What is prepared once per kind of call, and how it is launched."""
