"""What one call of attention asks for: options, tensors, sequence offsets, and the plan and explanation that follow from them."""
