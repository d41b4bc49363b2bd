"""A site's data: its suture.toml, tables, images, text and splits; `readers` has one module per data set."""
