"""dash-attn inside code that calls attention by another name. Import the integration you need; none is imported here."""
