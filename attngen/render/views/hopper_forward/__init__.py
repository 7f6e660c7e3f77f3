"""The earlier path of ``attngen.render.cuda_arguments``, kept for programs that import it."""

from attngen.render.cuda_arguments import argument_lines

__all__ = ["argument_lines"]
