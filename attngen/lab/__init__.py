"""The laboratory: ``attngen bench``, ``tune`` and ``verify``. Only the command line imports it, when one of them runs."""
