"""Forward and backward passes in Triton."""
