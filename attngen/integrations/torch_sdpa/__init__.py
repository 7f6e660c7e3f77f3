"""torch's scaled_dot_product_attention, its flash operators and context parallelism."""
