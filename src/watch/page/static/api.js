// Questions to the server. The address of the page holds the token, and every address here is relative to it.

const BASE = new URL("api/", document.baseURI.split("#")[0]);

/** Asks; the answer is what the function of this name in api.py returns. */
export async function ask(name, given = {}, signal) {
  const address = new URL(name, BASE);
  for (const [key, value] of Object.entries(given))
    if (value !== undefined && value !== null && value !== "") address.searchParams.set(key, String(value));
  const answer = await fetch(address, { signal, credentials: "omit" });
  const text = await answer.text();
  if (answer.status === 401) throw new Error("This address is no longer valid: dash was started again. Open the address that it printed.");
  let content;
  try {
    content = JSON.parse(text);
  } catch {
    throw new Error(`the server's answer can't be read (${answer.status})`);
  }
  if (!answer.ok) throw new Error(content.error ?? `error ${answer.status}`);
  return content;
}
