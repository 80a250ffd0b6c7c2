// Asks this service. The token lives in this module's memory and nowhere else: no cookie, no storage, no address.

let token = "";

export function useToken(given) {
  token = given.trim();
}

export class Refused extends Error {
  constructor(status, detail) {
    super(detail.message ?? `status ${status}`);
    this.status = status;
    this.where = detail.where ?? "";
  }
}

// Numbers keep the text that they came as: an id of 64 bits is more than a double holds. Old browsers do not tell it.
export function parse(text) {
  return JSON.parse(text, (key, value, about) =>
    Number.isInteger(value) && !Number.isSafeInteger(value) && about?.source ? new Literal(about.source) : value);
}

export class Literal {
  constructor(text) {
    this.text = text;
  }

  toString() {
    return this.text;
  }
}

export async function ask(path, body) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const answer = await fetch(path, { method, headers, body, cache: "no-store", credentials: "omit", redirect: "error" });
  const text = await answer.text();
  if (answer.ok) return parse(text);
  let detail = {};
  try {
    detail = JSON.parse(text).error ?? {};
  } catch {
    // not ours: a proxy's
  }
  throw new Refused(answer.status, detail);
}
