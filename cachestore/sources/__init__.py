"""Sources of samples: folders, manifests, prompt lists, tars, and objects in memory."""
