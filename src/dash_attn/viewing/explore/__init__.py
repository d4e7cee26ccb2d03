"""A page on which runs can be looked at; docs/explore.md has its design."""
