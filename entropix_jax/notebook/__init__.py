"""How results look in a notebook: HTML without scripts, in the colours of the pages."""
