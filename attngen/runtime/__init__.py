"""Loading cubins and calling them. Packages, from lower to upper: device, arguments, kernels, geometry, reference,
registry, launch, autograd, operations, exported; each imports those before it."""
