"""Loading cubins and calling them: registry, selection, argument packing, launch, torch operators, reference."""
