"""Built kernels compared with the float64 reference."""
