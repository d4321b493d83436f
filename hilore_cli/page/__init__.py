"""`hilore report`: one page that shows a plan, self-contained, light and dark; and its pictures as PNG.

`rows.py` turns records into rows, `pictures.py` rows into charts, `theme.py` charts into SVG and PNG, `document.py` all into the page.
Altair draws, vl-convert renders (both of the extra `report`): the page holds finished SVG whose colours are CSS variables, so that it
needs no network, no script to be read, and one drawing for light and dark.
"""
