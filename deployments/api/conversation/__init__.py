"""A conversation on its way to token ids: rendered, cut, and encoded where no earlier turn has done so."""
