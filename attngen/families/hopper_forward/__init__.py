"""Forward passes on Hopper: TMA, warp specialization and wgmma, in 16 and in 8 bits."""
