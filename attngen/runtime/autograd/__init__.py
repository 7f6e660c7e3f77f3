"""Gradients: autograd, torch.func, and derivatives of gradients."""
