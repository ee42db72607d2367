"""Results in a notebook: HTML without scripts, with tokens drawn as on the pages of `report`."""
