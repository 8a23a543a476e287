// The colours of a picture at some points: arguments are the PNG in base64 and the points; the last is the callback.
const [png, points, done] = arguments;
const content = Uint8Array.from(atob(png), (one) => one.charCodeAt(0));
// Not as an image by its address, which the content security policy forbids.
createImageBitmap(new Blob([content], { type: "image/png" })).then((picture) => {
  const canvas = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
  canvas.drawImage(picture, 0, 0);
  done(points.map(([x, y]) => [...canvas.getImageData(x, y, 1, 1).data].slice(0, 3)));
});
