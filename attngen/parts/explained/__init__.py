"""Parts of ``attngen explain`` that several families share."""
