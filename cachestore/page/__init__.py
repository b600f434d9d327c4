"""A report as a page: numbers to HTML and SVG, pictures to PNG. Pure functions; knows no store and opens no file."""
