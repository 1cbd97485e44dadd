"use strict";
// What the report and the page of `headmax serve` draw alike.
const PALETTE = 8, BORDERS = ["none", "solid", "dashed", "dotted", "double"];
/** A head's colour at a strength in 0..1; beyond eight heads the line below tells them apart. */
const paint = (head, strength) =>
  `background:color-mix(in srgb,var(--h${head % PALETTE}) calc((var(--least) + (var(--most) - var(--least)) * ${strength.toFixed(3)}) * 1%),transparent);` +
  (head < PALETTE ? "" : `border-bottom:2px ${BORDERS[Math.floor(head / PALETTE) % BORDERS.length]} var(--h${head % PALETTE})`);
/** A share's strength: 0 where all heads share evenly, 1 where one takes all. */
const above = (value, even) => (even < 1 ? Math.min(1, Math.max(0, (value - even) / (1 - even))) : 1);
const plain = text => text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣");
