// Starts Swagger UI on the OpenAPI document beside this page.

addEventListener("DOMContentLoaded", () => {
  globalThis.SwaggerUIBundle({ url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true });
});
