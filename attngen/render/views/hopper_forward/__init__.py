"""See ``attngen.render.cuda_arguments``."""

from attngen.render.cuda_arguments import argument_lines

__all__ = ["argument_lines"]
