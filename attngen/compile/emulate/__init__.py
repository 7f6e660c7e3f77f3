"""Concrete emulation of what a kernel computes with integers, from its PTX and from its machine code alike."""
