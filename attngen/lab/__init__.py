"""The laboratory: ``attngen bench``, ``tune`` and ``verify``. Nothing imports it but, by name, the command line."""
