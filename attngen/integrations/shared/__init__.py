"""Parts that several integrations share."""
